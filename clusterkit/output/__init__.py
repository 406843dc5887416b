"""What ranks print and report: kept, merged, read, shown to other tools."""
