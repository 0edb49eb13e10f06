"""The parts of a decoder on torch, by the shapes of `models/decoder/shapes.py`."""
