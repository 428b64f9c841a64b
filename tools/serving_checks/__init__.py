"""What the checks of serving share: requests, jobs in processes of their own, and how answers are compared."""
