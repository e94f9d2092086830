"""`python -m rollout_corr COMMAND`: the command line, which lives in cli/main.py."""

from rollout_corr.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
