"""Messages of the Open Inference Protocol, generated from ``oip.proto`` by ``make proto``."""
