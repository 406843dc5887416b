VALUE = "found beside the program"
