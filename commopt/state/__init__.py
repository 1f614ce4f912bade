"""What an optimizer holds: state in buckets, of replicas that may differ; followed, compared, saved and loaded."""
