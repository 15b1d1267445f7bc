"""Pipeline schedules: pure functions to lists of actions, and the simulator that prices any of them."""
