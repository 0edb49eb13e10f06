"""From a body's fields to requests, and from outputs to answers."""
