"""Small generators and fakes that the tests share."""
