"""What holds for every test: no example has a time limit, so that a busy machine fails nothing."""

from hypothesis import settings

settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
