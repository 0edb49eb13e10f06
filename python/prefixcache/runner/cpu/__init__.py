"""The model on a CPU: numpy and Rust."""
