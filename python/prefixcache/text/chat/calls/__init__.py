"""Calls of tools in answers: the formats in which families of models write them."""
