"""Loading ahead: fetch and load the executables that the program's last run wanted."""
