"""The arithmetic of a decoder layer, one small module an operation."""
