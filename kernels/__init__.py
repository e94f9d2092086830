"""The Triton kernels, installed as `rollout_corr.kernels`. One folder for each operation; the files here are shared.

In a jitted function whatever has no type is a tensor.
"""

# A copy on the Hub has the backend and the commit around the name of the package.
if "rollout_corr" not in __name__.rpartition(".")[0]:
    raise ImportError(
        f"this folder is rollout_corr.kernels and was imported as {__name__!r}. The top-level name `kernels` is "
        "another distribution's, which the root of a rollout-corr checkout hides when it is on sys.path. Import "
        "rollout_corr.kernels, and run from another folder (or `pytest` instead of `python -m pytest`)."
    )
