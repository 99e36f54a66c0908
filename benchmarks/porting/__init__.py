"""What ``zoo.py`` does with a model beside skyctl: train it by plain torch, and ask other tracers."""
