"""Watches over a run: notices that ranks die or hang, plans for those that are left, hands on the state in memory."""
