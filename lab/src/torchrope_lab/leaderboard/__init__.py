"""The leaderboard: train every encoding on several data sets, merge entries of other runs, and rank the encodings."""
