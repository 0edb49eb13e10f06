"""Messages, tools and options to a prompt and a grammar; the text of an answer to a message."""
