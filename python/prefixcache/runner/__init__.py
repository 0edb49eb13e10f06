"""Turns a `StepPlan` into tensors, runs the model and samples."""
