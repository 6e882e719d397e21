"""Commands about adapters: register, convert, try, promote, retire, pin."""
