"""Policies and stores decide what backward finds kept and what it computes again."""
