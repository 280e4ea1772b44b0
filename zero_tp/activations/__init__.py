"""What backward finds kept and what it computes again."""
