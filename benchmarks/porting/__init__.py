"""The tasks of ``zoo.py`` with a model beside skyctl: train it by plain torch, and ask other tracers."""
