"""Tiers of blocks behind the ones in memory."""
