"""Settings that hold for every test."""

from hypothesis import settings

# No deadline: the machines that run this are shared. Derandomized: a red run is red again for whoever looks into it.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
