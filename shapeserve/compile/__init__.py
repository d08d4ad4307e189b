"""Programs, tiers and compile accounting: how a bucket becomes a variant."""
