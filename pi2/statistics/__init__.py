"""What a model's neurons do on real text: recorded while a plan runs, kept as Parquet."""
