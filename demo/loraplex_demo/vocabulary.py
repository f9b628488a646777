"""Word lists of the demo's records: names, places, things and syllables.

Changing a list changes what the committed weights were trained on.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ONSETS = _words("b d f g h k l m n p r s t v z br ch dr gr kl pl st tr sh")
VOWELS = _words("a a a e e e i i o o u u é ö ü")
CODAS = ("", "", "n", "r", "s", "l")
FIRST_NAMES = _words(
    "Ada Ali Amir Ana Anders Aya Beata Ben Bianca Boris Carla Chen Clara Dalia Dana David Diego Dora Elif Elena "
    "Emil Emma Erik Fatima Felix Finn Freya Grace Hana Hugo Ines Ivan Jana Jonas José Julia Kai Karim Lea Leon Lina "
    "Luca Lukas Maja Maria Marta Mei Mila Mina Nadia Nils Noah Nora Olga Omar Oscar Otto Paula Pedro Petra Priya "
    "Rafael Ravi Rosa Ruth Samir Sara Sofia Tariq Theo Tom Uma Vera Viktor Wanda Yara Yusuf Zoë"
)
LAST_NAMES = _words(
    "Abbas Adler Alves Bauer Becker Berg Bianchi Blum Braun Castro Costa Dahl Diaz Dubois Eriksen Farah Fischer "
    "Fuchs Garcia Gruber Haas Hansen Hoffman Ibrahim Ito Jensen Kaya Keller Khan Klein Kovacs Kruse Lang Larsen "
    "Lopez Maier Marino Mendes Meyer Moreau Nagy Nguyen Novak Okafor Olsen Ortega Patel Pereira Popov Ricci Rossi "
    "Sato Schmidt Silva Singh Sokolov Suzuki Tanaka Vogel Wagner Weber Winkler Wolf Yilmaz Zhang Ziegler"
)
CITIES = _words(
    "Aarhus Accra Athens Basel Bergen Berlin Bilbao Boston Bremen Cairo Cardiff Chennai Cork Dakar Delhi Denver "
    "Dublin Essen Faro Geneva Ghent Graz Hanoi Havana Izmir Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmö "
    "Manila Milan Munich Nairobi Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Seoul Sofia "
    "Tampere Tokyo Toronto Tunis Turin Utrecht Vienna Warsaw Zagreb Zürich"
)
ADJECTIVES = _words(
    "amber ancient bitter black blue brass bright broken calm clear cold copper dark deep dry early empty fair "
    "final first gentle golden grand green grey hidden hollow iron late little lonely long lost narrow new northern "
    "old open pale plain quiet rapid red round rough royal secret sharp short silent silver simple slow small "
    "smooth soft steel tall thin warm white wide wild winter wooden young"
)
NOUNS = _words(
    "anchor answer arch basket bell bird bottle bowl bridge brush candle chair clock cloud coast cup desk door "
    "engine field flute forest garden gate glass hammer harbour house island kettle key ladder lamp lantern letter "
    "light machine map market mirror moon mountain needle night ocean orchard paper path pencil piano pillow radio "
    "rain river road rope saddle sail shadow shelf shore song spoon star stone storm street table tent tower train "
    "tree valley violin wagon wall water wheel window winter"
)
GATHERINGS = _words("Concert Conference Exhibition Fair Festival Lecture Meetup Race Summit Workshop")
GENRES = _words("biography crime drama fantasy history poetry science travel")
STATUSES = _words("cancelled delivered new paid returned shipped")
ROOMS = _words("attic basement bathroom bedroom cellar garage hall kitchen lab office")
DOMAINS = _words("example.com example.net example.org mail.example post.example")
ANY = FIRST_NAMES + LAST_NAMES + CITIES + ADJECTIVES + NOUNS
