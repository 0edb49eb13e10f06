"""What an engine needs to run in a thread of its own, for any number of event loops."""
