"""The state directory: what a server keeps of its calls, and how it comes back from it."""
