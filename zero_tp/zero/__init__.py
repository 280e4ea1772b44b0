"""Everything that knows the insides of DeepSpeed is here."""
