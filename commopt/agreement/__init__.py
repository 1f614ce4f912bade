"""What all ranks must have alike: compared at construction, at the beginning of every call, and in every step."""
