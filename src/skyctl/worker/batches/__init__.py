"""The batches of a rank: read, cut into its samples, and sketched so that ends can be compared."""
