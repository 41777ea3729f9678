"""What several test modules share: processes, hosts, jobs, stores."""
