"""Runs are saved and resumed here."""
