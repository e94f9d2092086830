"""The Triton kernels, installed as `rollout_corr.kernels`. One folder for each operation; the files here are shared."""

if __name__ != "rollout_corr.kernels":
    raise ImportError(
        f"this folder is rollout_corr.kernels and was imported as {__name__!r}. The top-level name `kernels` is "
        "another distribution's, which the root of a rollout-corr checkout hides when it is on sys.path. Import "
        "rollout_corr.kernels, and run from another folder (or `pytest` instead of `python -m pytest`)."
    )
