"""Who may do what, how much of it, and over which connections."""
