"""What can be seen of a server from outside: figures, traces, logs."""
