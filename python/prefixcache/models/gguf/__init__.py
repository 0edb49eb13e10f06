"""GGUF files: their header, the tokenizer they hold, and the model folder made of them."""
