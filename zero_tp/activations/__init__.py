"""Policies and stores that decide what backward finds kept and what it computes again."""
