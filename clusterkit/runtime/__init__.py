"""What clusterkit itself runs with torch: measuring links, counting a model's parameters.

The only part of clusterkit that imports torch. Programs in ranks need nothing of it.
"""
