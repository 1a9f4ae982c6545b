"""What is left where it should not be: gradients not zeroed, kept too long, or never made."""
