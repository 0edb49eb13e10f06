"""Text in and out: tokens, chat templates, grammars."""
