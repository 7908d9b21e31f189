"""What calls rewards: their code, their arguments, threads and processes, results and failures."""
