"""What hosts are called and what they have."""
