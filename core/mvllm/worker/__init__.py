"""The worker of one rank: loads the model and runs the steps."""
