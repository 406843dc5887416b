"""What people see of a run: words, progress, plots. Fed by the log stream and the status only."""
