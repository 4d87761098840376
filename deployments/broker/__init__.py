"""What goes through the broker: snapshots and live events out, job ids to workers, activity in."""
