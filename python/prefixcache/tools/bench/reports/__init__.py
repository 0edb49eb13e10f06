"""Tables, pages and plots of a benchmark."""
