"""The ckptspec standard as package data: schemas, rules and prose."""
