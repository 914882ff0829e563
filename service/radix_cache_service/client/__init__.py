"""The clients' side: both clients, and what they know of their leases and of answers that were lost."""
