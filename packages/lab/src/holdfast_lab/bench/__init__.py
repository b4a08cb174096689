"""Speed, as ratios against the bare alternative in the same run, interleaved."""
