"""The parts of `EngineConfig`, and how the text of their flags is read."""
