"""The queue: intake, policies, fair shares, deadlines, reservations, fork groups."""
