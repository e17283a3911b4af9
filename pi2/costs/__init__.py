"""What steps of a plan take on a device: one description, for planner and simulator alike."""
